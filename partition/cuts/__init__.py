"""Cuts: the balance whose slowest stage is as fast as can be, on these devices, within their memory."""
