"""Other libraries with packed weights; each is imported only where it is used."""

INSTALL_TRANSFORMERS = "pip install 'transformers>=5.17' accelerate"
