"""Operations that quantise activations, alone or fused with the preceding norm or gated activation; and that norm and
that activation without a quantiser."""
