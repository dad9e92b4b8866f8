"""vLLM: the quantization method "samebits", which compresses while loading, and reads compressed folders.

    plugin.py      what vLLM calls in each of its processes
    config.py      which layers get which method
    layers.py      linear layers, embeddings and heads
    experts.py     mixtures of experts
    weights.py     packed weights, and the operators that compiled graphs have for them
    loader.py      reading compressed folders

vLLM cuts and joins a checkpoint's tensors as it loads them (tensor parallelism, fused projections), so a compressed
folder's are decoded on their way in, and what a layer holds at the end is packed anew. No more than a layer is plain at
a time.
"""
