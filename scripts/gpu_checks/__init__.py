"""The stages of scripts/check_gpu.py. Stages 1 to 3 need torch, triton and numpy only."""
