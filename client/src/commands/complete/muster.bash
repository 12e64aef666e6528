# Completion of muster for bash: source <(muster completion bash)
_muster() {
    local word about
    COMPREPLY=()
    while IFS=$'\t' read -r word about; do
        if [[ $word == :files ]]; then
            compopt -o default
        elif [[ $word == "${COMP_WORDS[COMP_CWORD]}"* ]]; then
            COMPREPLY+=("$(printf %q "$word")")
        fi
    done < <("${COMP_WORDS[0]}" __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _muster muster
