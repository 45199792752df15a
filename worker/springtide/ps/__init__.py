"""Parameters on servers: gradients leave during backward, values come back layer by layer."""
