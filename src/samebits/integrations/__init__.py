"""Other libraries with packed weights; each is imported only where it is used."""

MINIMUM = {"transformers": "5.17", "diffusers": "0.42", "peft": "0.21"}  # older versions are left alone
INSTALL_TRANSFORMERS = f"pip install 'transformers>={MINIMUM['transformers']}' accelerate"
