"""GPUs as NVIDIA's management library (NVML) tells of them: what they are and draw, how they are joined.

    NVML ──► gpus (fields) ─┬─ numbering (as CUDA counts) ─┬─► inventory: devices() ──► tables, command
         ──► links (pairs) ─┘                              ├─► selection: Choice, in the order of a pipeline
         ──► sampling (power, utilisation)  ◄──────────────┘

Nothing here starts CUDA: no context, no memory on a device, and a process may still fork afterwards.
"""
