"""What is trained: the model, its published sizes, the data, and the step."""
