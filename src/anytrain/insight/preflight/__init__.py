"""Know before a run what will fail in it, on a machine that is not here.

One step of the real run is traced on a device that is only claimed; questions are asked of the
trace, one file each in `checks/`.
"""
