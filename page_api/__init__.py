"""What the page asks of the server: routes, who may use them, states of nodes and builds."""
