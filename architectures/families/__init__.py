"""The families of networks, a module each; ``ldm`` has what both networks of Stable Diffusion share."""
