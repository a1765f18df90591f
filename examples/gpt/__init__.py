"""The parts of train_gpt.py: text, model, the same training in one process, what is reported."""
