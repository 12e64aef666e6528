# Completion of muster for bash: source <(muster completion bash)
_muster() {
    local word about piece next at breaks= done=
    local rest=${COMP_LINE:-"${COMP_WORDS[*]}"}
    local -a words=()
    COMPREPLY=()
    # Bash splits words at these characters. Pieces without a space before them are one word.
    [[ $COMP_WORDBREAKS == *:* ]] && breaks+=:
    [[ $COMP_WORDBREAKS == *=* ]] && breaks+==
    for ((at = 0; at <= COMP_CWORD; at++)); do
        piece=${COMP_WORDS[at]}
        next=${rest#"${rest%%[![:space:]]*}"}
        if ((at == 0)) || [[ $next != "$rest" ]]; then
            words+=("$piece")
        else
            words[${#words[@]} - 1]+=$piece
        fi
        rest=${next#"$piece"}
    done
    local current=${words[${#words[@]} - 1]}
    # Only what follows the last of these characters is replaced.
    [[ -n $breaks && $current == *[$breaks]* ]] && done=${current%"${current##*[$breaks]}"}
    while IFS=$'\t' read -r word about; do
        if [[ $word == :files ]]; then
            compopt -o default
        elif [[ $word == "$current"* ]]; then
            COMPREPLY+=("$(printf %q "${word#"$done"}")")
        fi
    done < <("${words[0]}" __complete -- "${words[@]:1}" 2>/dev/null)
}
complete -F _muster muster
