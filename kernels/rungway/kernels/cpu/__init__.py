"""Kernels for CPUs with AVX-512 VNNI, in C++: compiled where they run, called through ctypes."""
