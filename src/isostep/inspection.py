def inspect(model, *a):
    class R:
        def raise_if_refused(self, allow=()): pass
    return R()
