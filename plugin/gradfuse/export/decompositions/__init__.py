"""ATen operators in terms of those that torch.onnx translates."""
