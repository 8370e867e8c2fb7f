"""The families of networks, a module each; ``ldm`` has what UNet and ControlNet of Stable Diffusion share."""
