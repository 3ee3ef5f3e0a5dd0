#!/bin/sh
# Whole runs of Qwen3.5 and LLaDA2 on several ranks: losses, gradient norms and evaluations of one rank, checkpoints that
# go on with another layout, and one message where heads do not reach.  test_family_runs.sh ITHACA WORK_DIR
. "$(dirname "$0")/whole_runs.sh"
need_mpirun
i=0
while [ $i -lt 40 ]; do
    more=$(printf 'and one %.0s' $(seq 1 $((1 + i % 7 + i % 10 / 9 * 10)))) # one in ten is long
    printf '{"messages": [{"role": "user", "content": "How much is %d %s?"}, {"role": "assistant", "content": "It is %d %s."}]}\n' \
        $i "$more" $((i + 1)) "$more"
    i=$((i + 1))
done >"$work/data.jsonl"
run_yaml "dtype: float32" "bf16: false" "micro_batch_size: 2" "max_steps: 4" "save_steps: 2" "eval_split_ratio: 0.2" \
    "eval_strategy: steps" "eval_steps: 4"
qwen3_5_moe float32 4 >"$work/qwen3_5.json"
init qwen3_5 --config "$work/qwen3_5.json"
init llada2 -s tiny-llada2 --dtype float32

# family NAME MODEL LAYOUT key=value...: one rank, then LAYOUT, then its checkpoint on three ranks in another layout
family() {
    name=$1 dir=$2 layout=$3; shift 3
    train "$name" "$dir" "$@" || { fail "$name ended with $?"; tail -3 "$work/$name.out"; return; }
    # shellcheck disable=SC2086
    train "$name-ranks" "$dir" $layout "$@" || { fail "$name $layout ended with $?"; tail -3 "$work/$name-ranks.out"; return; }
    same "$name-ranks" "$name"
    mkdir -p "$work/$name-on" && cp -r "$work/$name-ranks/checkpoint-2" "$work/$name-on/" &&
        cp "$work/$name-ranks/trainer_log.jsonl" "$work/$name-on/"
    train "$name-on" "$dir" cp_size=3 zero_stage=1 linear_cp_mode=states resume_from_checkpoint=auto "$@" ||
        { fail "$name: resumed run ended with $?"; tail -3 "$work/$name-on.out"; return; }
    grep -q "resumed .*checkpoint-2" "$work/$name-on.out" || fail "$name-on: did not resume"
    same "$name-on" "$name"
}

family qwen qwen3_5 "dp_size=2 cp_size=2 ep_size=2" batching_strategy=packing
family whole qwen3_5 "dp_size=2 cp_size=2 ep_size=2 cp_whole_documents=always" batching_strategy=dynamic_padding_free
# a mean over each micro-batch: they stay what they are, the small ones on one rank
family balanced qwen3_5 "dp_size=2 cp_size=2 ep_size=2 cp_whole_documents=always" router_aux_loss_coef=0.05
grep -q "micro-batches of up to [0-9]* tokens stay whole on one rank$" "$work/balanced-ranks.out" && grep -q '"aux_loss"' "$work/balanced/trainer_log.jsonl" ||
    fail "balanced: nothing stays whole, or nothing is balanced"
train qwen-rings qwen3_5 cp_size=8 zero_stage=3 batching_strategy=packing || { fail "qwen-rings ended with $?"; tail -3 "$work/qwen-rings.out"; }
same qwen-rings qwen # more ranks than attention or linear heads
grep -q "attention: ulysses 4 x ring 2" "$work/qwen-rings.out" && grep -q "passes states" "$work/qwen-rings.out" ||
    { fail "qwen-rings: other scheme"; grep "attention" "$work/qwen-rings.out"; }
family blocks llada2 "dp_size=2 cp_size=2 cp_mode=ring zero_stage=2" diffusion_config.name=block_diffusion diffusion_config.block_size=8
family random llada2 "cp_size=4 cp_mode=hybrid ep_size=4" diffusion_config.name=random_mask diffusion_config.normalizer=micro_batch
# documents whole on one rank beside cut ones: noise after every padding, copies, means of micro-batches
family blocks-whole llada2 "dp_size=2 cp_size=2 zero_stage=3 cp_whole_documents=always" diffusion_config.name=block_diffusion \
    diffusion_config.block_size=8 diffusion_config.padding=block diffusion_config.complementary=true
family random-whole llada2 "dp_size=2 cp_size=2 zero_stage=2 cp_whole_documents=always" diffusion_config.name=random_mask \
    diffusion_config.normalizer=micro_batch diffusion_config.confidence_beta=0.5 diffusion_config.padding=none micro_batch_size=1
family edits-whole llada2 "cp_size=2 zero_stage=0 cp_whole_documents=always" diffusion_config.name=block_diffusion \
    diffusion_config.padding=end diffusion_config.random_tokens=0.2 diffusion_config.confidence_beta=0.5 batching_strategy=packing
for run in blocks-whole random-whole edits-whole; do
    grep -q "\(documents\|micro-batches\) of up to [0-9]* tokens stay whole on one rank$" "$work/$run-ranks.out" || fail "$run: nothing stays whole"
done
# means of micro-batches depend on what is in one: one sample
family means llada2 "dp_size=4 zero_stage=1" micro_batch_size=1 diffusion_config.name=block_diffusion diffusion_config.normalizer=micro_batch

# Images: more ranks than some rows have frames, and a row without any.
if "$ithaca" env 2>/dev/null | grep -q "pictures.*png"; then
    echo "iVBORw0KGgoAAAANSUhEUgAAAGAAAAAgBAMAAAAf7mBnAAAAMFBMVEUA/wAQ8igg5VAw2HhAy6BQvshgsfBwpBiAl0CQimigfZCwcLjAY+DQVgjgSTDwPFiD/RbfAAABr0lEQVR42o2T0ZGkMAxEuykC6OcMPPkn54tgPyR72Km72wUKhOmnlmVjSXIk8bvg1g8HPwF8JP4fQI1KMn8D+AbA00HiAxjfHTo16RenUzTgOJLGBkrPcfgsydHys6T8s5MNSB5lep/WpT6gCFlIoYFBzYHHpF2co10SwpEt6fUYuUvcQtKUkUBolYvjIL3KIVJ2H+nPBa14NrmDexe0xf0MkmXKytGI0IhuyVIKcTZUtwgjh07huR0K6dVv3cp4AJg4u60ul613zIoIDYw4nkIv+S5lad+ng6jEQlNoFM57t7pPhFg4xjEnCVke8X3EUarbiEXVs4EOxjwLp1hWHAuxMoK7BmEc/uBwHFIGKoeVFu4nLA9w2mHPIVZc+uDAAWz6zfcR9tXic+FwgZkOI++F23LFLYYGPAIXOJOaQ6wjZ+VkxoHVyQkPB2/KyssOdsCkyjdhOkzz2HyxldhOMFu/Q+rWbVXU6qUEOyUK1zQBPEbgusZZuI1QFq33qOQwgIzJvX/oQpaVBGx34zGMAJN1vfbms8ultTYkeVdOBXM+dqtte9lKHUfawHUNGPAFeTo9+zcl1n8AAAAASUVORK5CYII=" | base64 -d >"$work/wide.png"
    echo "iVBORw0KGgoAAAANSUhEUgAAACAAAABABAMAAACJoGidAAAAMFBMVEUA/wAQ8igg5VAw2HhAy6BQvshgsfBwpBiAl0CQimigfZCwcLjAY+DQVgjgSTDwPFiD/RbfAAAAqElEQVR42s2Tyw3EIAxEZ1zBmA6SFrb/otLBHmCDMZHyUQ7LBTSMDX6yCQDu9KUsZV3LxwAQYVndpCSgGdkFBocOctREgKrAXxRHByTA2j2herLhiZ6UUdDwrmH8GW0sLTi0C0oOb39oHlmK2AHhGaCJx0SM2CIPAK7oUAxh4jFVexeQEqBkgOk5IAZA1xvmABBTw3RApw1zAogZ0JWGQebxdxO1vTRRX4+lB2G/Gu8oAAAAAElFTkSuQmCC" | base64 -d >"$work/tall.png"
    cat >"$work/pictures.jsonl" <<'END'
{"messages": [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": "A wide thing."}], "images": ["wide.png"]}
{"messages": [{"role": "user", "content": "Two: <image> and <image>."}, {"role": "assistant", "content": "Both are seen."}], "images": ["tall.png", "wide.png"]}
{"messages": [{"role": "user", "content": "No picture here."}, {"role": "assistant", "content": "Right."}]}
{"messages": [{"role": "user", "content": "<image>And now?"}, {"role": "assistant", "content": "A tall one, this time."}], "images": ["tall.png"]}
END
    "$ithaca" init "$work/seeing" --size qwen3.5-tiny --learn "$work/data.jsonl" --vocab-size 320 --dtype float32 >/dev/null 2>&1 ||
        fail "init qwen3.5-tiny"
    family pictures seeing "dp_size=2 cp_size=2 zero_stage=3" "train_dataset=$work/pictures.jsonl" global_batch_size=4 \
        eval_split_ratio=0.25
    # rows with a picture stay whole beside a long one, whose pictures two ranks share
    {
        cat "$work/pictures.jsonl"
        for n in 12 10; do # one of them may be held out
            printf '{"messages": [{"role": "user", "content": "Long: <image> %s and <image> %s and <image>."}, {"role": "assistant", "content": "So it is."}], "images": ["tall.png", "wide.png", "tall.png"]}\n' \
                "$(printf 'and one %.0s' $(seq 1 $n))" "$(printf 'or two %.0s' $(seq 1 $n))"
        done
    } >"$work/long.jsonl"
    family seen-whole seeing "dp_size=2 cp_size=2 zero_stage=2 cp_whole_documents=always" "train_dataset=$work/long.jsonl" \
        global_batch_size=4 micro_batch_size=1 cutoff_len=400 eval_split_ratio=0.2
    grep -q "documents of up to [0-9]* tokens stay whole on one rank$" "$work/seen-whole-ranks.out" || fail "seen-whole: nothing stays whole"
fi

train wrong qwen3_5 cp_size=8 cp_mode=ulysses
[ $? = 2 ] && grep -q "^error: .*cp_size: 8 is more than num_attention_heads 4" "$work/wrong.out" ||
    { fail "cp_size 8"; tail -3 "$work/wrong.out"; }

train wrong qwen3_5 ep_size=3 global_batch_size=6
[ $? = 2 ] && grep -q "^error: .*ep_size: 3 does not divide num_experts 8" "$work/wrong.out" ||
    { fail "ep_size 3"; tail -3 "$work/wrong.out"; }

finish "all layouts agree"
