"""Fused kernels in Triton: the reference's bits at memory speed. Importing a module of this package imports triton."""
