"""What is trained: model, data, costs."""
