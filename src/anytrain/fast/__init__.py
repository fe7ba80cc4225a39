"""Speed on CUDA: recorded steps, shortcuts through them, and kernels of our own.

Nothing below knows this room. A run asks for it in `engine/assemble/fast_room.py`; without the
folder every step runs op by op.
"""
