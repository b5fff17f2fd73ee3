"""The target's distributions along its own images: their concentration, and the earlier tokens they depend on."""
