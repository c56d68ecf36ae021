"""Operations that quantise activations, alone or behind a norm or a gated activation."""
