"""`specbench bench`: how long a decoding step takes, part by part, next to this device's memory floor."""
