"""The parts a recipe's YAML can swap; one idea a file, documented by its class. Imports `sparrow`, never a recipe."""
