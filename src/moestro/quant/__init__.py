"""Weight formats: what a stored matrix is, and its plain PyTorch unpacking, the reference for every kernel."""
