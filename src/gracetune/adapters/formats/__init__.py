"""How other programs spell an adapter's tensors: one module per format, and what tells them apart.

names       a key taken apart: which expert, which layer, which tensor
layers      one layer's tensors made into a `Layer`, or refused
fusing      layers that are one matrix in the original model, joined and parted
reading     any file into states; `detect` says what the file is
writing     what the formats share; comfyui, diffusers, kohya, lycoris are what they do not; `registry` lists them
"""
