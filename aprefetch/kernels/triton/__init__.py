"""Triton kernels for CUDA devices, compiled on first use and cached by Triton."""
