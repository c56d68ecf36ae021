"""Operations that quantise activations, alone or fused with the preceding norm or gated activation."""
