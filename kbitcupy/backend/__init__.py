"""What talks to the libraries below: NumPy or CuPy, DLPack and torch, NVRTC, the driver."""
