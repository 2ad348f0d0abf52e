"""ONNX models as files: read, validated, inlined, written."""
