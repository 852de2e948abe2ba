"""An analytic model of step time: what a precision would gain on hardware that is not at hand. No measurement."""
