"""The file formats of adapters, which differ in the keys and in the meaning of a missing alpha.

names         splits a key into expert, layer and tensor
layers        assembles one layer's tensors into a `Layer`, or rejects them
fused_layers  joins layers that are one matrix in the original model, and splits them again
detection     detects the family, expert, algorithm and format of a file
reading       reads a file of any format into states
writing       the part of writing that all formats share
record        the record of a format, which comfyui, diffusers, kohya and lycoris define; `registry` lists them
programs      which programs load which files correctly
"""
