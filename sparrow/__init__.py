"""Sparrow: reinforcement learning of reasoning language models with block-sparse rollouts, on plain PyTorch.

What every recipe stands on and nobody swaps. The parts a YAML swaps are in `sparrow.components`, the jobs in
`sparrow.recipes`. Importing this package imports nothing else, so that the command line answers at once.
"""
