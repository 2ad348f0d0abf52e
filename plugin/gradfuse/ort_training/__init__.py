"""What reads the artifacts of onnxruntime-training 1.19.2, without that package."""
