"""From weight files to models: official checkpoints, this project's own format, and the bundles that a run loads."""
