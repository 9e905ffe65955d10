"""Operations and memory traffic of a forward with speculation, operator by operator (SSSD, table 1)."""

from typing import NamedTuple

from .roofline import Roofline


class Operator(NamedTuple):
    """
    Operator of a layer, with its operations and memory traffic.

    Args:
        name (`str`): Its formula in the table.
        flops (`float`): Floating-point operations.
        read, written (`float`): Numbers, not bytes, from and to memory.
        limit (`float`): What `intensity` approaches where weights or cached keys and values outweigh all other reads.
    """

    name: str
    flops: float
    read: float
    written: float
    limit: float

    @property
    def intensity(self) -> float:
        """Operations per number read or written (FLOPs:IO)."""
        return self.flops / (self.read + self.written)

    def seconds(self, roofline: Roofline, bytes_per_number: float = 2.0) -> float:
        """Return the time on a device that computes and reads at the same time: that of the slower one."""
        return max(self.flops / roofline.flops, (self.read + self.written) * bytes_per_number / roofline.bandwidth)


class LayerSizes(NamedTuple):
    """
    Sizes of a dense decoder's layer, named as in SSSD's table 1, whose n is told apart for queries and for keys.

    Args:
        hidden (`int`): h.
        heads, kv_heads (`int`): n_q and n_kv.
        head (`int`): d, the size of a head.
        mlp (`int`): h_mlp.
        mlp_matrices (`int`): 2 as in the table, W_1 and W_2, or 3 where a gate has a matrix of its own, as in Llama.
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    mlp_matrices: int = 2

    def operators(self, b: int, s_q: int, s_kv: int) -> list[Operator]:
        """
        Return the rows of the table: Q, K_new, V_new, attention without its mask, Y and Z.

        Args:
            b (`int`): Batch size.
            s_q (`int`): Speculation length: the last committed token, and the draft tokens of a row.
            s_kv (`int`): Tokens in a row's context.
        """
        h, d, tokens = self.hidden, self.head, b * s_q

        def product(name: str, inputs: int, outputs: int) -> Operator:
            return Operator(
                name, 2 * tokens * inputs * outputs, tokens * inputs + inputs * outputs, tokens * outputs, 2 * tokens
            )

        query, keys = self.heads * d, self.kv_heads * d
        attention = Operator(
            "A = FA(Q, K, V)",
            4 * tokens * (s_q + s_kv) * query,
            tokens * query + 2 * b * (s_kv + s_q) * keys,
            tokens * query,
            2 * s_q * self.heads / self.kv_heads,
        )
        mlp = Operator(
            "Z = W_2 SiLU(Y W_1)",
            2 * self.mlp_matrices * tokens * h * self.mlp,
            tokens * h + self.mlp_matrices * h * self.mlp,
            tokens * h,
            2 * tokens,
        )
        return [
            product("Q = X W_q", h, query),
            product("K_new = X W_k", h, keys),
            product("V_new = X W_v", h, keys),
            attention,
            product("Y = A W_o", query, h),
            mlp,
        ]
