#!/bin/sh
# Answers of several ranks: those of one, row by row, for every family, greedy and drawn, with whole weights and with
# weights cut among the ranks, each rank with its own prompts and groups that share them; more ranks than prompts; one
# line when a rank fails.  test_answers.sh ITHACA WORK_DIR
. "$(dirname "$0")/whole_runs.sh"
questions 11 "What lies behind cape %d?" "Bay %d." 2
for i in 0 1 2 3 4 5 6 7 8 9 10; do # lengths differ
    echo "What lies behind cape $(seq -s ' and ' 0 $i)?" >>"$work/prompts.txt"
done
qwen3_5_moe float32 4 >"$work/linear.json"
init qwen3 -s tiny
init qwen3_moe -s tiny-moe
init qwen3_5 --config "$work/linear.json"
init llada2 -s tiny-llada2

answer() { # RANKS NAME MODEL options...
    ranks=$1 name=$2 model=$3; shift 3
    timeout 60 "$start" "$ranks" "$ithaca" generate "$work/$model" "$work/prompts.txt" --max-new-tokens 12 --threads 1 --device cpu \
        --batch 3 "$@" >"$work/$name.jsonl" 2>"$work/$name.err"
}
for model in qwen3 qwen3_moe qwen3_5 llada2; do
    how="--block-size 8 --record $work/record.jsonl" drawn="--block-size 8 --temperature 0.9 --seed 5"
    [ $model = llada2 ] || how="--do-sample false" drawn="--do-sample true --temperature 1.0 --seed 5"
    for way in "$how" "$drawn"; do
        rm -f "$work/record.jsonl"
        # shellcheck disable=SC2086
        answer 1 one $model $way || { fail "$model $way"; tail -2 "$work/one.err"; continue; }
        [ "$(wc -l <"$work/one.jsonl")" = 11 ] || fail "$model: not 11 rows"
        [ -f "$work/record.jsonl" ] && mv "$work/record.jsonl" "$work/record-one"
        for layout in "3" "2 --cut-weights" "4 --cut-weights --ep-size 2" "13 --cut-weights"; do
            # shellcheck disable=SC2086
            set -- $layout
            ranks=$1; shift
            [ "$model-$ranks" = qwen3-4 ] && set -- --cut-weights # no experts
            # shellcheck disable=SC2086
            answer "$ranks" many $model $way "$@" || { fail "$model $way, $ranks ranks $* ended with $?"; tail -2 "$work/many.err"; continue; }
            cmp -s "$work/one.jsonl" "$work/many.jsonl" || fail "$model $way: $ranks ranks $* answer otherwise"
            [ ! -f "$work/record.jsonl" ] || cmp -s "$work/record.jsonl" "$work/record-one" || fail "$model: other record, $ranks ranks $*"
        done
    done
    # Groups of ranks share prompts and cache: equal up to rounding.
    # shellcheck disable=SC2086
    answer 1 one $model $drawn --dtype float32 || { fail "$model $drawn"; continue; }
    for layout in "3 --cp-size 3" "4 --cp-size 2 --cp-mode ring" "6 --cp-size 2 --cut-weights --ep-size 2"; do
        # shellcheck disable=SC2086
        set -- $layout
        ranks=$1; shift
        [ "$model-$ranks" = qwen3-6 ] && set -- --cp-size 2 --cut-weights
        # shellcheck disable=SC2086
        answer "$ranks" many $model $drawn --dtype float32 "$@" || { fail "$model, $ranks ranks $* ended with $?"; tail -2 "$work/many.err"; continue; }
        cmp -s "$work/one.jsonl" "$work/many.jsonl" || fail "$model: $ranks ranks $* answer otherwise"
    done
done

# A rank without memory, anywhere: one line from one rank.
for cut in "" --cut-weights "--cp-size 2"; do
    hit=0
    for n in 100 400 1150 1200 1250 1400 1600 1700 1720 1740 1760 1780 1800; do
        # shellcheck disable=SC2086
        ITH_FAULT_RANK=1 ITH_FAULT_SPEC=alloc:$n answer 2 fault qwen3 $cut
        code=$?
        [ $code = 0 ] && continue
        hit=$((hit + 1))
        [ $code = 1 ] && [ "$(grep -c '^error: rank 1: ' "$work/fault.err")" = 1 ] && [ "$(grep -c '^error: ' "$work/fault.err")" = 1 ] ||
            { fail "alloc:$n $cut ended with $code"; grep '^error' "$work/fault.err"; }
    done
    [ $hit -ge 3 ] || fail "only $hit faults hit"
done
# One prompt of the command line: text, from one rank or many.
for model in qwen3 llada2; do
    for layout in 1 3 "2 --cut-weights" "2 --cp-size 2"; do
        # shellcheck disable=SC2086
        set -- $layout
        ranks=$1; shift
        timeout 60 "$start" "$ranks" "$ithaca" generate "$work/$model" --prompt "What lies behind cape 3?" -n 8 --threads 1 --device cpu "$@" \
            >"$work/text-$ranks" 2>"$work/text.err" || { fail "$model: --prompt, $layout ended with $?"; tail -2 "$work/text.err"; }
        cmp -s "$work/text-1" "$work/text-$ranks" || fail "$model: --prompt, $layout: another text"
    done
    [ -s "$work/text-1" ] && ! grep -q '"row"' "$work/text-1" || fail "$model: --prompt: no text"
done
answer 2 wrong qwen3_moe --cut-weights --ep-size 3
[ $? = 2 ] && [ "$(grep -c '^error: --ep-size: 3 does not divide' "$work/wrong.err")" = 1 ] || { fail "ep-size 3"; tail -2 "$work/wrong.err"; }
answer 2 alone qwen3_moe --ep-size 2
[ $? = 2 ] && [ "$(grep -c '^error: generate: --ep-size goes with --cut-weights' "$work/alone.err")" = 1 ] || { fail "ep-size alone"; tail -2 "$work/alone.err"; }
# A conversation of several ranks: the text of one.
printf 'What lies behind cape 3?\nAnd behind capes 4 and 5?\n/image none.png\n/clear\n\nWho crosses the river?\n' >"$work/talk.txt"
talk() { # RANKS NAME MODEL options...
    ranks=$1 name=$2 model=$3; shift 3
    # shellcheck disable=SC2016
    TALK=$work/talk.txt timeout 60 "$start" "$ranks" sh -c '[ "$RANK" = 0 ] && exec "$@" <"$TALK"; exec "$@" </dev/null' sh \
        "$ithaca" chat "$work/$model" -n 10 --threads 1 --device cpu --dtype float32 --context 200 "$@" >"$work/$name.txt" 2>"$work/$name.err"
}
for model in qwen3 qwen3_moe qwen3_5 llada2; do
    way="--do-sample true --temperature 1.0 --seed 5"
    [ $model = llada2 ] && way="--block-size 8"
    # shellcheck disable=SC2086
    talk 1 said $model $way && [ -s "$work/said.txt" ] || { fail "chat $model"; tail -2 "$work/said.err"; continue; }
    for layout in 3 "2 --cut-weights"; do
        # shellcheck disable=SC2086
        set -- $layout
        ranks=$1; shift
        # shellcheck disable=SC2086
        talk "$ranks" all $model $way "$@" || { fail "chat $model, $layout ended with $?"; tail -2 "$work/all.err"; }
        cmp -s "$work/said.txt" "$work/all.txt" || fail "chat $model, $layout: another text"
    done
done
talk 2 long qwen3 --context 20
[ $? = 1 ] && [ "$(cat "$work/long.err")" = "error: rank 0: the conversation has 24 tokens, the context holds 20 (/clear starts anew, --context sets it)" ] ||
    { fail "chat: too long"; tail -2 "$work/long.err"; }
ITH_FAULT_RANK=1 ITH_FAULT_SPEC=alloc:1000 talk 2 fault qwen3
[ $? = 1 ] && [ "$(grep -c '^error: rank 1: ' "$work/fault.err")" = 1 ] && [ "$(grep -c '^error: ' "$work/fault.err")" = 1 ] ||
    { fail "chat: a rank without memory"; tail -2 "$work/fault.err"; }
while read -r ranks model options wanted; do
    # shellcheck disable=SC2046
    answer "$ranks" wrong "$model" $(echo "$options" | tr = ' ')
    [ $? = 2 ] && [ "$(grep -c "^error: $wanted" "$work/wrong.err")" = 1 ] || { fail "$options"; tail -2 "$work/wrong.err"; }
done <<END
3 qwen3 --cp-size=2 --cp-size: 2 does not divide the 3 ranks
1 qwen3 --cp-size=2 --cp-size: 2 does not divide the 1 ranks
5 qwen3_5 --cp-size=5 --cp-size: 5 is more than linear_num_value_heads 4
3 qwen3 --cp-size=3=--cp-mode=hybrid --cp-mode: none of this kind for 3 ranks
END

finish "all ranks answer as one"
