"""Answers to the page: routes, who may use them, states of nodes and builds."""
