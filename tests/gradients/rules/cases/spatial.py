"""Resize, sampling at points and regions, columns and images."""

from tests.gradients.rules.cases import Case


def _resize() -> list[Case]:
    cases = []

    def add(
        name: str,
        options: str,
        inputs: str = "float[1,2,3,4] x",
        scales: str = "1,1,2,2",
        **more: object,
    ) -> None:
        numbers = ", ".join(str(float(s)) for s in scales.split(","))
        cases.append(
            Case(
                f"Resize {name}",
                inputs,
                f"s = Constant<value_floats = [{numbers}]>() y = Resize<{options}>(x, , s)",
                **more,
            )
        )  # type: ignore[arg-type]

    def sized(
        name: str,
        options: str,
        inputs: str = "float[1,2,3,4] x",
        sizes: str = "1,2,5,7",
        roi: str = "",
        **more: object,
    ) -> None:
        n, r = sizes.count(",") + 1, roi.count(",") + 1
        constants = f"int64[{n}] s = {{{sizes}}}" + (f", float[{r}] r = {{{roi}}}" if roi else "")
        cases.append(
            Case(
                f"Resize {name}",
                inputs,
                f"y = Resize<{options}>(x, {'r' if roi else ''}, , s)",
                constants,
                **more,
            )
        )  # type: ignore[arg-type]

    modes = (
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
    )
    for c in modes:
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
            o = (
                f'mode = "nearest", coordinate_transformation_mode = "{c}", nearest_mode ='
                f' "{rounding}"'
            )
            add(f"nearest {c} {rounding} twice", o)
            sized(f"nearest {c} {rounding} 5x7", o)
            add(
                f"nearest {c} {rounding} smaller",
                o,
                "float[1,1,5,6] x",
                "1,1,0.61,0.53",
                single=c == "align_corners",
            )
            add(f"nearest {c} {rounding} thrice", o, "float[1,1,2,3] x", "1,1,3,3")
        for mode in ("linear", "cubic"):
            o = f'mode = "{mode}", coordinate_transformation_mode = "{c}"'
            add(f"{mode} {c} twice", o)
            sized(f"{mode} {c} 5x7", o)
            add(
                f"{mode} {c} smaller",
                o,
                "float[1,1,5,6] x",
                "1,1,0.61,0.53",
                single=c == "align_corners",
            )
            if c != "align_corners":
                add(
                    f"{mode} {c} antialias",
                    o + ", antialias = 1",
                    "float[1,1,5,6] x",
                    "1,1,0.61,0.53",
                )
    for a in (0, 1):
        add(
            f"cubic excludes antialias={a}",
            f'mode = "cubic", exclude_outside = 1, cubic_coeff_a = -0.5, antialias = {a}',
            "float[1,1,5,4] x",
            "1,1,0.6,1.5",
        )
    # single: the reference does not extrapolate or copy as onnxruntime does
    for mode in ("nearest", "linear", "cubic"):
        sized(
            f"{mode} crop",
            single=mode != "nearest",
            options=(
                f'mode = "{mode}", coordinate_transformation_mode = "tf_crop_and_resize",'
                " extrapolation_value = 3.0"
            ),
            sizes="1,2,3,3",
            roi="0,0,0.1,-0.2,1,1,0.8,1.3",
        )
        sized(
            f"{mode} crop axes",
            f'mode = "{mode}", coordinate_transformation_mode = "tf_crop_and_resize",'
            " extrapolation_value = 3.0, axes = [3, 2]",
            sizes="3,1",
            roi="0.1,-0.2,1.3,0.9",
        )
        for policy in ("not_larger", "not_smaller"):
            sized(
                f"{mode} {policy}",
                options=f'mode = "{mode}", keep_aspect_ratio_policy = "{policy}", axes = [2, 3]',
                sizes="5,9",
            )
        sized(f"{mode} axes", f'mode = "{mode}", axes = [3]', sizes="6")
        add(f"{mode} of a copied axis", f'mode = "{mode}"', "float[1,1,3,4] x", "1,1,1.3,2")
        add(
            f"{mode} copies",
            single=True,
            options=f'mode = "{mode}"',
            inputs="float[1,1,3,3] x",
            scales="1,1,1.3,1.3",
        )
        add(f"{mode} rank 2", f'mode = "{mode}"', "float[3,4] x", "2,1.6")
    for mode in ("nearest", "linear"):
        add(f"{mode} rank 3", f'mode = "{mode}"', "float[1,3,4] x", "1,2,1.6")
        add(f"{mode} rank 5", f'mode = "{mode}"', "float[1,2,2,3,2] x", "1,1,1.5,1.4,2")
        add(f"{mode} rank 3, all", f'mode = "{mode}"', "float[2,3,4] x", "2,1.4,1.6")
    add("nearest rank 1", 'mode = "nearest"', "float[3] x", "1.7")
    add("nearest channels", 'mode = "nearest"', "float[2,3,2,2] x", "2,1.5,1,2")
    add("nearest rank 5 twice", 'mode = "nearest"', "float[1,2,2,2,3] x", "1,1,2,2,3")
    return cases


def _sample() -> list[Case]:
    cases = []
    for padding in ("zeros", "border", "reflection"):
        for corners in (0, 1):
            for mode in ("nearest", "linear", "cubic"):
                options = f'mode = "{mode}", padding_mode = "{padding}", align_corners = {corners}'
                frozen = ("g",) if mode == "nearest" else ()
                cases.append(
                    Case(
                        f"GridSample {mode} {padding} {corners}",
                        "float[2,2,3,4] x, float[2,2,3,2] g",
                        f"y = GridSample<{options}>(x, g)",
                        frozen=frozen,
                    )
                )
                if mode != "cubic":
                    cases.append(
                        Case(
                            f"GridSample {mode} {padding} {corners} in space",
                            "float[1,2,3,2,3] x, float[1,2,1,2,3] g",
                            f"y = GridSample<{options}>(x, g)",
                            frozen=frozen,
                        )
                    )
    for corners in (0, 1):
        cases.append(
            Case(
                f"AffineGrid {corners}",
                "float[2,2,3] t",
                f"y = AffineGrid<align_corners = {corners}>(t, s)",
                "int64[4] s = {2, 1, 3, 2}",
            )
        )
        cases.append(
            Case(
                f"AffineGrid {corners} in space",
                "float[2,3,4] t",
                f"y = AffineGrid<align_corners = {corners}>(t, s)",
                "int64[5] s = {2, 5, 2, 3, 2}",
            )
        )
    transformer = "n = Shape(x) g = AffineGrid(t, n) y = GridSample(x, g)"
    cases.append(
        Case(
            "AffineGrid and GridSample",
            "float[2,2,3] t, float[2,1,4,4] x",
            transformer,
            low=-0.8,
            high=0.8,
        )
    )
    for name, inputs, options, image, block in (
        ("", "float[2,4,6] x", "", "3, 4", "2, 2"),
        (
            " strides pads dilations",
            "float[1,4,9] x",
            "<strides = [2, 1], pads = [1, 0, 2, 1], dilations = [1, 2]>",
            "3, 4",
            "2, 2",
        ),
        (" of lines", "float[2,6,3] x", "", "5", "3"),
        (" in space", "float[1,8,2] x", "", "2, 3, 2", "2, 2, 2"),
    ):
        d = image.count(",") + 1
        constants = f"int64[{d}] image = {{{image}}}, int64[{d}] block = {{{block}}}"
        # twice: the only judge in float64, the reference, cannot crop by negative pads, as the
        # gradient of Pad does
        cases.append(
            Case(
                f"Col2Im{name}",
                inputs,
                f"y = Col2Im{options}(x, image, block)",
                constants,
                twice="pads" not in options,
            )
        )
    return cases


def _pool() -> list[Case]:
    cases = []
    image, regions = "float[2,2,4,5] x", "0.3, 0.4, 3.7, 2.2, 1, 1, 1.4, 3.1, -3, 0.2, 6.3, 2.7"
    for mode in ("avg", "max"):
        for ratio in (0, 2):
            for half in ("half_pixel", "output_half_pixel"):
                options = (
                    f'mode = "{mode}", sampling_ratio = {ratio}, coordinate_transformation_mode ='
                    f' "{half}", output_height = 2, output_width = 3'
                )
                given = (
                    f"r = Constant<value_floats = [{regions}]>() n = Constant<value_ints = [3,"
                    " 4]>() r1 = Reshape(r, n) r2 = CastLike(r1, x)"
                )
                body = f"{given} y = RoiAlign<{options}>(x, r2, b)"
                cases.append(
                    Case(f"RoiAlign {mode} {ratio} {half}", image, body, "int64[3] b = {0, 1, 1}")
                )
    regions = "0, 0, 0, 3, 2, 1, 1.5, 1, 2.4, 3, 1, 2, 0, 4, 7, 0, 9, 9, 12, 12"
    more = f"float[4,5] r = {{{regions}}}"
    # single: neither onnxruntime nor the reference has it in float64
    cases.append(
        Case("MaxRoiPool", image, "y = MaxRoiPool<pooled_shape = [2, 2]>(x, r)", more, single=True)
    )
    cases.append(
        Case(
            "MaxRoiPool scaled",
            image,
            "y = MaxRoiPool<pooled_shape = [3, 1], spatial_scale = 0.7>(x, r)",
            more,
            single=True,
        )
    )
    return cases


CASES = [*_resize(), *_sample(), *_pool()]
