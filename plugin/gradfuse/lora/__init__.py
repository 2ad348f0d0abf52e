"""Low-rank adapters: added to ONNX models, trained there, and saved for PEFT and for onnxruntime's LoraAdapter."""
