"""What the target's laws look like along its own images: how sure they are, and which earlier tokens they heed."""
