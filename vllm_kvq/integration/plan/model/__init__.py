"""What a model's configuration says of its layers, its weights and its positions."""
