"""Polynomials over the elements of tensors: what canonical forms are written in."""
