"""`specbench bench`: how long a decoding step takes, part by part, beside what this device's memory allows."""
