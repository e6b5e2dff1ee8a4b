"""What is known to cost no product: PyTorch's bookkeeping namespaces, and ops whose names suggest otherwise."""

from __future__ import annotations

_BOOKKEEPING = """
    _c10d_functional _c10d_functional_autograd _dtensor _inductor_debug _inductor_test _native _native_aot
    _quantized _test ao bucketing c10d coor cplib debug debug_mode_ops debugprims device_mesh dtensor export
    flex_gemm flex_lib fsdp inductor inductor_prims mempool mkl mkldnn mkldnn_prepacked onednn onnx prepacked prim
    prims profiler quantization quantized quantized_decomposed rngprims sparse static_runtime streams symm_mem
"""
BOOKKEEPING: frozenset[str] = frozenset(_BOOKKEEPING.split())
"""Namespaces that name, move, wrap, send, pack or quantize; the products among their ops have formulas."""

UNCOUNTED: dict[str, str] = {
    "aten._spsolve": "a sparse direct solver, whose fill-in depends on the pattern",
    "aten._cslt_sparse_mm_search": "tries products until it knows the fastest, how many it does not say",
    "inductor.quack_symmetric_mm": "a matrix times its own transpose, of which the kernel computes half, by tiles",
    "prims.svd": "a decomposition that only reference code calls",
    "prims.fft_c2c": "a transform that only reference code calls",
    "prims.fft_c2r": "a transform that only reference code calls",
    "prims.fft_r2c": "a transform that only reference code calls",
    "prepacked.conv2d_clamp_run": "a mobile kernel behind a packed weight",
    "prepacked.conv2d_transpose_clamp_run": "a mobile kernel behind a packed weight",
    "prepacked.linear_clamp_run": "a mobile kernel behind a packed weight",
    "mkldnn_prepacked.conv2d_run": "a mobile kernel behind a packed weight",
}
"""Products without a formula, and why they have none. They are listed as uncounted where they run."""

_ZEROS: dict[str, str] = {
    "a norm: sums and element-wise work": """
        _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional _fused_rms_norm
        _fused_rms_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _weight_norm_interface _weight_norm_interface_backward batch_norm_backward
        batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt cudnn_batch_norm cudnn_batch_norm_backward
        linalg__powsum linalg_vector_norm miopen_batch_norm miopen_batch_norm_backward native_batch_norm
        native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
        native_layer_norm_backward quantized_batch_norm
    """,
    "a loss: sums and element-wise work, whose weight scales": """
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits multi_margin_loss
        multi_margin_loss_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
    """,
    "rows picked from a table and summed": """
        _embedding_bag _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward embedding
    """,
    "element-wise": """
        _foreach_lerp _foreach_lerp_ _prelu_kernel _prelu_kernel_backward erfinv erfinv_ lerp lerp_ linalg_cross polar
    """,
    "distances pair by pair, without a product": "_cdist_backward _pdist_backward _pdist_forward dist",
    "the gates of a cell, whose products are already computed": """
        _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    """,
    "interpolation: a few neighbours a point": """
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward upsample_bilinear2d upsample_bilinear2d_backward
        upsample_linear1d upsample_linear1d_backward upsample_trilinear3d upsample_trilinear3d_backward
    """,
    "counts, with weights": """
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors bincount histogram
    """,
    "packing, unpacking, reordering or converting, without arithmetic": """
        _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _convert_weight_to_int4pack
        _convert_weight_to_int4pack_for_cpu _cudnn_rnn_flatten_weight _dyn_quant_pack_4bit_weight lu_unpack
        mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight slice_inverse
    """,
    "a question or a check, without arithmetic": "_fused_sdp_choice _linalg_check_errors",
    "a softmax": "_nested_tensor_softmax_with_shape",
    "random numbers, whose key is a seed": """
        _philox_key_fold_in _philox_key_split _philox_normal _philox_normal_ _philox_randint _philox_randint_
        _philox_uniform _philox_uniform_
    """,
    "evenly spaced numbers": "fft_fftfreq fft_rfftfreq",
}

KNOWN_ZERO: dict[str, str] = {f"aten.{name}": reason for reason, names in _ZEROS.items() for name in names.split()}
"""aten ops that look like products and are none, and why."""

PLAIN_HIGHER_ORDER: frozenset[str] = frozenset(("print", "_export_tracepoint", "inline_asm_elementwise"))
"""Higher-order ops that do nothing, or nothing but element-wise work."""
