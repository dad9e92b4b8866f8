"""Other libraries with packed weights; each is imported only where it is used."""

# Older versions are left alone.
MINIMUM = {"transformers": "5.17", "diffusers": "0.42", "peft": "0.21", "sentence_transformers": "6.2"}
INSTALL_TRANSFORMERS = f"pip install 'transformers>={MINIMUM['transformers']}' accelerate"
