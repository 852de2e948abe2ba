"""The reference backend: plain torch on any device, the executable definition of every format."""
