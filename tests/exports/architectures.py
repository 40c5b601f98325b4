"""The architectures that train from their exported file: a name, and a function that makes the
network and its inputs, small and random.

Sizes are the smallest with every layer of the real thing; weights that an exporter could take for
constants of shape arithmetic (1024 elements or fewer, where `optimize=True` computes them away)
stay rare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

try:
    import torchvision.models as tv
except RuntimeError:  # its compiled operators belong to another build of torch; no network here uses them, only their names are missed
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        )
    import torchvision.models as tv

BATCH, CLASSES = 2, 5


@dataclass
class Architecture:
    """A network that returns one tensor, what it is fed, and which axis of the output counts the
    classes.
    """

    network: nn.Module
    inputs: tuple[Tensor, ...]
    class_axis: int = 1


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {}


def architecture(make: Callable[[], Architecture]) -> Callable[[], Architecture]:
    ARCHITECTURES[make.__name__] = make
    return make


class Of(nn.Module):
    """A network of transformers that takes its arguments by position and returns one tensor of its
    answer.
    """

    def __init__(
        self, model: nn.Module, *arguments: str, output: str = "logits", **settings: Any
    ) -> None:
        super().__init__()
        self.model, self.arguments, self.output, self.settings = model, arguments, output, settings

    def forward(self, *inputs: Tensor) -> Tensor:
        answer = self.model(**dict(zip(self.arguments, inputs)), **self.settings)
        return answer[self.output] if isinstance(answer, dict) else answer


def images(size: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def tokens(length: int = 9, vocabulary: int = 200) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, length))


def mask(length: int = 9) -> Tensor:
    """The second sentence is two tokens shorter."""
    found = torch.ones(BATCH, length, dtype=torch.int64)
    found[1, -2:] = 0
    return found


# torch.nn


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = (
            kind(12, 24, num_layers=2, bidirectional=True, batch_first=True),
            nn.Linear(48, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 36)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(36, 2, 64, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)).mean(1))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 36)
        self.layers = nn.Transformer(36, 2, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(
            self.layers(
                self.embedding(source), self.embedding(target), tgt_mask=causal, tgt_is_causal=True
            ).mean(1)
        )


@architecture
def lstm() -> Architecture:
    return Architecture(Recurrent(nn.LSTM), (torch.randn(BATCH, 7, 12),))


@architecture
def gru() -> Architecture:
    return Architecture(Recurrent(nn.GRU), (torch.randn(BATCH, 7, 12),))


@architecture
def rnn() -> Architecture:
    return Architecture(Recurrent(nn.RNN), (torch.randn(BATCH, 7, 12),))


@architecture
def transformer_encoder() -> Architecture:
    return Architecture(Encoder(), (tokens(),))


@architecture
def transformer() -> Architecture:
    return Architecture(Sequence(), (tokens(), tokens(6)))


# torchvision


def slim(*widths: int) -> nn.Sequential:
    """A classifier in the place of one with most of a network's weights."""
    return nn.Sequential(
        nn.Dropout(),
        nn.Linear(widths[0], widths[1]),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(widths[1], CLASSES),
    )


@architecture
def alexnet() -> Architecture:
    network = tv.alexnet(num_classes=CLASSES)
    network.avgpool = nn.AdaptiveAvgPool2d(1)  # 64 pixels leave one, not six
    network.classifier = slim(256, 64)
    return Architecture(network, (images(),))


@architecture
def vgg() -> Architecture:
    network = tv.VGG(
        tv.vgg.make_layers([16, "M", 24, "M", 32, 32, "M"], batch_norm=True), num_classes=CLASSES
    )
    network.classifier = slim(32 * 7 * 7, 32)
    return Architecture(network, (images(56),))


@architecture
def resnet18() -> Architecture:
    return Architecture(tv.resnet18(num_classes=CLASSES), (images(),))


@architecture
def resnet50() -> Architecture:
    return Architecture(
        tv.ResNet(tv.resnet.Bottleneck, [1, 2, 1, 1], CLASSES, width_per_group=16), (images(),)
    )


@architecture
def resnext() -> Architecture:
    return Architecture(
        tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=8),
        (images(),),
    )


@architecture
def squeezenet() -> Architecture:
    return Architecture(tv.squeezenet1_1(num_classes=CLASSES), (images(),))


@architecture
def densenet() -> Architecture:
    return Architecture(tv.DenseNet(16, (2, 2, 2, 2), 32, num_classes=CLASSES), (images(),))


@architecture
def googlenet() -> Architecture:
    return Architecture(
        tv.googlenet(
            num_classes=CLASSES, aux_logits=False, init_weights=False, transform_input=True
        ),
        (images(),),
    )


@architecture
def inception() -> Architecture:
    return Architecture(
        tv.inception_v3(num_classes=CLASSES, aux_logits=False, init_weights=False), (images(80),)
    )


@architecture
def mobilenet_v2() -> Architecture:
    return Architecture(tv.mobilenet_v2(num_classes=CLASSES, width_mult=0.5), (images(),))


@architecture
def mobilenet_v3() -> Architecture:
    return Architecture(tv.mobilenet_v3_small(num_classes=CLASSES), (images(),))


@architecture
def mnasnet() -> Architecture:
    return Architecture(tv.mnasnet0_5(num_classes=CLASSES), (images(),))


@architecture
def shufflenet() -> Architecture:
    return Architecture(tv.shufflenet_v2_x0_5(num_classes=CLASSES), (images(),))


@architecture
def efficientnet() -> Architecture:
    return Architecture(tv.efficientnet_b0(num_classes=CLASSES), (images(),))


@architecture
def regnet() -> Architecture:
    return Architecture(tv.regnet_y_400mf(num_classes=CLASSES), (images(),))


@architecture
def convnext() -> Architecture:
    block = tv.convnext.CNBlockConfig
    blocks = [block(24, 48, 1), block(48, 64, 2), block(64, None, 1)]
    return Architecture(tv.ConvNeXt(blocks, num_classes=CLASSES, layer_scale=0.5), (images(),))


@architecture
def vision_transformer() -> Architecture:
    return Architecture(
        tv.VisionTransformer(32, 8, 2, 2, 48, 96, num_classes=CLASSES), (images(32),)
    )


@architecture
def swin() -> Architecture:
    return Architecture(
        tv.SwinTransformer([4, 4], 48, [2, 2], [2, 4], [4, 4], num_classes=CLASSES), (images(40),)
    )


@architecture
def swin_v2() -> Architecture:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return Architecture(
        tv.SwinTransformer(
            [4, 4],
            48,
            [2, 2],
            [2, 4],
            [4, 4],
            num_classes=CLASSES,
            block=SwinTransformerBlockV2,
            downsample_layer=PatchMergingV2,
        ),
        (images(40),),
    )


@architecture
def maxvit() -> Architecture:
    return Architecture(
        tv.MaxVit((64, 64), 32, 4, [32, 48], [1, 1], 16, 0.0, num_classes=CLASSES), (images(),)
    )


@architecture
def deeplab() -> Architecture:
    network = tv.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES
    )
    return Architecture(Of(network, "x", output="out"), (images(),))


@architecture
def lraspp() -> Architecture:
    network = tv.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES
    )
    return Architecture(Of(network, "input", output="out"), (images(),))


@architecture
def fcn() -> Architecture:
    resnet = tv.ResNet(
        tv.resnet.Bottleneck,
        [1, 1, 1, 1],
        CLASSES,
        width_per_group=16,
        replace_stride_with_dilation=[False, True, True],
    )
    backbone = tv._utils.IntermediateLayerGetter(resnet, {"layer4": "out"})
    return Architecture(
        Of(
            tv.segmentation.FCN(backbone, tv.segmentation.fcn.FCNHead(2048, CLASSES)),
            "x",
            output="out",
        ),
        (images(),),
    )


@architecture
def r3d() -> Architecture:
    block = tv.video.resnet
    network = tv.video.VideoResNet(
        block.BasicBlock,
        [block.Conv3DSimple] * 4,
        [1, 1, 1, 1],
        block.BasicStem,
        num_classes=CLASSES,
    )
    return Architecture(network, (torch.randn(BATCH, 3, 4, 32, 32),))


@architecture
def r2plus1d() -> Architecture:
    block = tv.video.resnet
    network = tv.video.VideoResNet(
        block.BasicBlock,
        [block.Conv2Plus1D] * 4,
        [1, 1, 1, 1],
        block.R2Plus1dStem,
        num_classes=CLASSES,
    )
    return Architecture(network, (torch.randn(BATCH, 3, 4, 32, 32),))


# transformers: encoders of text

SMALL = {
    "vocab_size": 200, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip


def classifier(family: str, **settings: Any) -> Architecture:
    """A sentence with a mask, and its class."""
    config = getattr(hf, f"{family}Config")(**{**SMALL, "num_labels": CLASSES, **settings})
    network = Of(
        getattr(hf, f"{family}ForSequenceClassification")(config), "input_ids", "attention_mask"
    )
    return Architecture(network, (tokens(), mask()))


def encoder(name: str, family: str, **settings: Any) -> None:
    ARCHITECTURES[name] = partial(classifier, family, **settings)


encoder("bert", "Bert")
encoder("roberta", "Roberta", pad_token_id=1)
encoder("xlm_roberta", "XLMRoberta", pad_token_id=1)
encoder("albert", "Albert", embedding_size=32)
encoder("electra", "Electra", embedding_size=32)
encoder("mpnet", "MPNet", pad_token_id=1)
encoder("distilbert", "DistilBert", dim=48, n_layers=2, n_heads=4, hidden_dim=64)
encoder(
    "deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16, norm_rel_ebd="layer_norm",
    share_att_key=True, max_relative_positions=32,
)  # fmt: skip
encoder(
    "deberta",
    "Deberta",
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    max_relative_positions=32,
)
encoder(
    "modernbert",
    "ModernBert",
    local_attention=8,
    global_attn_every_n_layers=2,
    cls_token_id=1,
    sep_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
encoder(
    "mobilebert",
    "MobileBert",
    embedding_size=32,
    intra_bottleneck_size=32,
    num_feedforward_networks=2,
)
encoder("squeezebert", "SqueezeBert", embedding_size=48)
encoder("convbert", "ConvBert", embedding_size=48, conv_kernel_size=3, head_ratio=2, num_groups=1)
encoder("roformer", "RoFormer", embedding_size=48)
encoder("fnet", "FNet", type_vocab_size=2)
encoder("layoutlm", "LayoutLM")
encoder("esm", "Esm", pad_token_id=1, mask_token_id=2, position_embedding_type="rotary")

# transformers: language models


def decoder_of(family: str, **settings: Any) -> Architecture:
    """Tokens in, the next token's logits out."""
    config = getattr(hf, f"{family}Config")(
        **{**SMALL, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, **settings}
    )
    return Architecture(
        Of(
            getattr(hf, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(config),
            "input_ids",
            "attention_mask",
            use_cache=False,
        ),
        (tokens(), mask()),
        class_axis=-1,
    )


def decoder(name: str, family: str, **settings: Any) -> None:
    ARCHITECTURES[name] = partial(decoder_of, family, **settings)


GROUPED = {"num_key_value_heads": 2}  # two queries share a key

decoder("gpt2", "GPT2", n_embd=48, n_layer=2, n_head=4, n_positions=64)
decoder(
    "gpt_neo",
    "GPTNeo",
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
)
decoder("gpt_neox", "GPTNeoX")
decoder("gptj", "GPTJ", n_embd=48, n_layer=2, n_head=4, n_positions=64, rotary_dim=8)
decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=48)
decoder("bloom", "Bloom", n_layer=2, n_head=4)
decoder("llama", "Llama", **GROUPED)
decoder("mistral", "Mistral", sliding_window=4, **GROUPED)
decoder(
    "mixtral",
    "Mixtral",
    num_local_experts=4,
    num_experts_per_tok=2,
    experts_implementation="batched_mm",
    **GROUPED,
)
decoder("qwen2", "Qwen2", **GROUPED)
decoder("qwen3", "Qwen3", head_dim=12, **GROUPED)
decoder("gemma", "Gemma", head_dim=12, **GROUPED)
decoder("gemma2", "Gemma2", head_dim=12, sliding_window=4, **GROUPED)
decoder("phi", "Phi")
decoder("phi3", "Phi3", **GROUPED)
decoder("falcon", "Falcon", num_hidden_layers=2)
decoder("stablelm", "StableLm", partial_rotary_factor=0.5, **GROUPED)
decoder("cohere", "Cohere", **GROUPED)
decoder("olmo2", "Olmo2", **GROUPED)
decoder("mamba", "Mamba", state_size=8, time_step_rank=8)

# transformers: two halves


@architecture
def t5() -> Architecture:
    config = hf.T5Config(
        vocab_size=200,
        d_model=48,
        d_kv=12,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    network = Of(
        hf.T5ForConditionalGeneration(config),
        "input_ids",
        "attention_mask",
        "decoder_input_ids",
        use_cache=False,
    )
    return Architecture(network, (tokens(), mask(), tokens(6)), class_axis=-1)


def sequences(family: str) -> Architecture:
    config = getattr(hf, f"{family}Config")(
        vocab_size=200, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    model = getattr(
        hf, {"Marian": "MarianMTModel"}.get(family, f"{family}ForConditionalGeneration")
    )(config)
    network = Of(model, "input_ids", "attention_mask", "decoder_input_ids", use_cache=False)
    return Architecture(network, (tokens(), mask(), tokens(6)), class_axis=-1)


for family in ("Bart", "MBart", "Pegasus", "Marian", "M2M100"):
    ARCHITECTURES[family.lower()] = partial(sequences, family)

# transformers: sound


@architecture
def whisper() -> Architecture:
    config = hf.WhisperConfig(
        vocab_size=200, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=24, max_target_positions=24, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    network = Of(
        hf.WhisperForConditionalGeneration(config),
        "input_features",
        "decoder_input_ids",
        use_cache=False,
    )
    return Architecture(network, (torch.randn(BATCH, 16, 48), tokens(6)), class_axis=-1)


SOUND = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32,
    "num_labels": CLASSES, "classifier_proj_size": 48,
}  # fmt: skip


def sound_of(family: str, **settings: Any) -> Architecture:
    config = getattr(hf, f"{family}Config")(**{**SOUND, **settings})
    return Architecture(
        Of(getattr(hf, f"{family}ForSequenceClassification")(config), "input_values"),
        (torch.randn(BATCH, 640),),
    )


ARCHITECTURES["wav2vec2"] = partial(sound_of, "Wav2Vec2")
ARCHITECTURES["hubert"] = partial(sound_of, "Hubert")
ARCHITECTURES["wavlm"] = partial(sound_of, "WavLM")
ARCHITECTURES["data2vec_audio"] = partial(sound_of, "Data2VecAudio", num_conv_pos_embeddings=2)
ARCHITECTURES["wav2vec2_stable"] = partial(
    sound_of, "Wav2Vec2", do_stable_layer_norm=True, feat_extract_norm="layer"
)


@architecture
def audio_spectrogram_transformer() -> Architecture:
    config = hf.ASTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_length=32, num_mel_bins=32,
        num_labels=CLASSES,
    )  # fmt: skip
    return Architecture(
        Of(hf.ASTForAudioClassification(config), "input_values"), (torch.randn(BATCH, 32, 32),)
    )


# transformers: images

PATCHES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def vision_of(family: str, size: int = 32, **settings: Any) -> Architecture:
    config = getattr(hf, f"{family}Config")(**{"num_labels": CLASSES, **settings})
    return Architecture(
        Of(getattr(hf, f"{family}ForImageClassification")(config), "pixel_values"), (images(size),)
    )


def vision(name: str, family: str, **settings: Any) -> None:
    ARCHITECTURES[name] = partial(vision_of, family, **settings)


vision("vit", "ViT", **PATCHES)
vision("deit", "DeiT", **PATCHES)
vision(
    "beit",
    "Beit",
    **PATCHES,
    attn_implementation="eager",
    use_relative_position_bias=True,
    layer_scale_init_value=0.5,
)
vision("dinov2", "Dinov2", **PATCHES, mlp_ratio=2)
vision(
    "swin_hf",
    "Swin",
    attn_implementation="eager",
    image_size=40,
    patch_size=4,
    embed_dim=48,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    size=40,
)
vision("convnext_v2", "ConvNextV2", num_stages=2, hidden_sizes=[32, 48], depths=[1, 1])
vision(
    "poolformer",
    "PoolFormer",
    hidden_sizes=[32, 48],
    depths=[1, 1],
    num_encoder_blocks=2,
    patch_sizes=[7, 3],
    strides=[4, 2],
    padding=[2, 1],
)
vision(
    "mobilevit",
    "MobileViT",
    size=64,
    image_size=64,
    hidden_sizes=[24, 32, 40],
    neck_hidden_sizes=[16, 16, 24, 32, 40, 48, 64],
)
vision(
    "pvt",
    "Pvt",
    size=64,
    image_size=64,
    hidden_sizes=[24, 32, 40, 48],
    num_attention_heads=[1, 2, 4, 4],
    depths=[1, 1, 1, 1],
)


@architecture
def segformer() -> Architecture:
    config = hf.SegformerConfig(
        hidden_sizes=[32, 32, 40, 48],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=48,
        num_labels=CLASSES,
        num_attention_heads=[1, 2, 4, 4],
    )
    return Architecture(
        Of(hf.SegformerForSemanticSegmentation(config), "pixel_values"), (images(),)
    )


@architecture
def clip() -> Architecture:
    text = {**SMALL, "bos_token_id": 1, "eos_token_id": 199, "projection_dim": 32}
    config = hf.CLIPConfig(text_config=text, vision_config=PATCHES, projection_dim=32)
    words = tokens(vocabulary=198)
    words[:, -1] = 199
    return Architecture(
        Of(hf.CLIPModel(config), "input_ids", "pixel_values", output="logits_per_image"),
        (words, images(32)),
    )


@architecture
def siglip() -> Architecture:
    config = hf.SiglipConfig(text_config=SMALL, vision_config=PATCHES)
    return Architecture(
        Of(hf.SiglipModel(config), "input_ids", "pixel_values", output="logits_per_image"),
        (tokens(), images(32)),
    )
