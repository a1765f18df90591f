"""The parts of recsys.py: flights, model, its sharding, the loops that train it, what is reported."""
