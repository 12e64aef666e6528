//! Commands: execution, results, loss and cancellation.

use std::fs;

use serde_json::json;

use crate::host::{Host, is_alive, wait_until};

#[test]
fn returns_exit_code_and_output() {
    let mut host = Host::new();
    let reply = host.execute("echo out; echo err >&2; exit 3");
    assert_eq!(reply["command"], "execute-response");
    assert_eq!(reply["command-line"], "echo out; echo err >&2; exit 3");
    assert_eq!((&reply["result"], &reply["return-code"]), (&json!(true), &json!(3)));
    assert_eq!((&reply["stdout"], &reply["stderr"]), (&json!("out\n"), &json!("err\n")));

    assert_eq!(host.execute("no-such-program-anywhere")["return-code"], 127);
    assert_eq!(host.execute("kill -9 $$")["return-code"], 128 + 9);
    assert_eq!(host.execute("pwd; cat; readlink /proc/self/fd/0")["stdout"], "/\n/dev/null\n");
    assert_eq!(host.execute("-n 2>/dev/null")["return-code"], 127);
    assert_eq!(host.execute("printf '\\377x'")["stdout"], "\u{fffd}x");
    assert_eq!(
        host.execute("trap 'echo ended' TERM; kill -TERM $$")["stdout"],
        "ended\n",
        "no signal is blocked"
    );
    assert_eq!(host.execute("yes | head -c 1000")["return-code"], 0);

    let reply = host.call(json!({ "command": "execute" }));
    assert_eq!(
        (&reply["command"], &reply["message"]),
        (&json!("command-error"), &json!("command-line is not set"))
    );
}

#[test]
fn truncates_inline_output() {
    let mut host = Host::new();
    let reply = host.execute("head -c 7000000 /dev/zero | tr '\\0' x; echo done >&2");
    assert_eq!(reply["stdout"].as_str().unwrap().len(), 5 << 20);
    assert_eq!((&reply["stderr"], &reply["return-code"]), (&json!("done\n"), &json!(0)));
}

#[test]
fn replies_with_pid_of_background_command() {
    let mut host = Host::new();
    let mark = host.path_text("mark");
    let line = format!("echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 1000");
    let reply = host.call(json!({ "command": "execute", "command-line": line, "block-for-result": false }));
    assert_eq!(reply["result"], true);
    wait_until("the command runs", || fs::exists(&mark).unwrap());
    let pid = fs::read_to_string(&mark).unwrap();
    assert_eq!(reply["pid"].to_string(), pid.trim());
    host.execute(&format!("kill {pid}"));
    wait_until("the command has ended", || !is_alive(&pid));
}

#[test]
fn serves_the_port_while_commands_run() {
    let mut host = Host::new();
    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    let slow = host.request(json!({ "command": "execute", "command-line": format!("cat {fifo}") }));
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    assert_eq!(host.execute("echo quick")["stdout"], "quick\n");
    host.execute(&format!("echo slow > {fifo}"));
    assert_eq!(host.reply(&slow)["stdout"], "slow\n");
}

#[test]
fn command_ends_although_its_background_process_runs() {
    let mut host = Host::new();
    let reply = host.execute("sleep 1000 & echo $!");
    let pid = reply["stdout"].as_str().unwrap().to_owned();
    assert!(is_alive(&pid), "background processes continue");
    host.execute(&format!("kill {pid}"));
}

#[test]
fn runs_keyed_command_once_and_remembers_result() {
    let mut host = Host::new();
    let mark = host.path_text("mark");
    let line = format!("echo run >> {mark}; seq 1 200000; echo no >&2; exit 4");
    let reply = host.execute_keyed("k-0", &line, false);
    assert_eq!(
        (&reply["key"], &reply["result"], &reply["return-code"]),
        (&json!("k-0"), &json!(true), &json!(4))
    );
    assert!(reply.get("stdout").is_none() && reply.get("stdout-cut").is_none(), "{reply}");
    assert_eq!(reply["stderr-size"], 3);

    let again = host.execute_keyed("k-0", &line, true);
    assert_eq!((&again["return-code"], &again["stdout-size"]), (&json!(4), &reply["stdout-size"]));
    let output = host.output("k-0", "stdout");
    assert_eq!(output.len() as u64, reply["stdout-size"].as_u64().unwrap());
    assert!(output.ends_with(b"199999\n200000\n"));
    assert_eq!(host.output("k-0", "stderr"), b"no\n");
    assert_eq!(fs::read_to_string(&mark).unwrap(), "run\n");

    assert_eq!(host.call(json!({ "command": "forget", "key": "k-0" }))["command"], "forget-response");
    let reply = host.execute_keyed("k-0", &line, true);
    assert_eq!((&reply["result"], &reply["reason"]), (&json!(false), &json!("unknown")));
    let request =
        json!({ "command": "read-output", "key": "k-0", "name": "stdout", "offset": 0, "length": 1 });
    assert_eq!(host.call(request)["command"], "command-error");
    assert!(!fs::exists(host.path("spool/commands/k-0")).unwrap());
}

#[test]
fn keyed_command_survives_reconnection() {
    let mut host = Host::new();
    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    let line = format!("cat {fifo}; exit 5");
    host.request(json!({ "command": "execute", "command-line": line, "key": "k" }));
    wait_until("the command runs", || fs::exists(host.path("spool/commands/k/process")).unwrap());
    host.reconnect();
    let waiting =
        host.request(json!({ "command": "execute", "command-line": line, "key": "k", "again": true }));
    host.execute(&format!("echo now > {fifo}"));
    let reply = host.reply(&waiting);
    assert_eq!((&reply["return-code"], &reply["stdout-size"]), (&json!(5), &json!(4)));
}

#[test]
fn restarted_agent_knows_results_and_lost_commands() {
    let mut host = Host::new();
    assert_eq!(host.execute_keyed("done", "echo kept; exit 6", false)["return-code"], 6);
    let mark = host.path_text("mark");
    let line = format!("sleep 1000 & echo $$ $! > {mark}.new; mv {mark}.new {mark}; wait");
    host.request(json!({ "command": "execute", "command-line": line, "key": "lost" }));
    wait_until("the command runs", || fs::exists(&mark).unwrap());
    wait_until("the process is recorded", || fs::exists(host.path("spool/commands/lost/process")).unwrap());
    let pids = fs::read_to_string(&mark).unwrap();
    host.restart_agent();

    let reply = host.execute_keyed("done", "", true);
    assert_eq!((&reply["result"], &reply["return-code"]), (&json!(true), &json!(6)));
    assert_eq!(host.output("done", "stdout"), b"kept\n");
    for again in [true, false] {
        let reply = host.execute_keyed("lost", &line, again);
        assert_eq!((&reply["result"], &reply["reason"]), (&json!(false), &json!("lost")));
    }
    for pid in pids.split_whitespace() {
        wait_until("its descendants have exited", || !is_alive(pid));
    }
    assert_eq!(host.execute_keyed("other", "", true)["reason"], "unknown");

    // The results of another boot are deleted.
    fs::write(host.path("spool/boot"), "another one").unwrap();
    host.restart_agent();
    assert_eq!(host.execute_keyed("done", "", true)["reason"], "unknown");
}

#[test]
fn cancel_terminates_all_descendants() {
    let mut host = Host::new();
    let mark = host.path_text("mark");
    // A process that ignores SIGTERM, one in another session and one in another process group.
    let line = format!(
        "(trap '' TERM; sleep 1000) & a=$!; setsid sleep 1000 & b=$!; \
         sh -mc 'sleep 1000 & echo $!; wait' > {mark}.c & until [ -s {mark}.c ]; do :; done; \
         echo $$ $a $b $(cat {mark}.c) > {mark}.new; mv {mark}.new {mark}; wait"
    );
    let waiting = host.request(json!({ "command": "execute", "command-line": line, "key": "k" }));
    wait_until("the command runs", || fs::exists(&mark).unwrap());
    let pids = fs::read_to_string(&mark).unwrap();
    assert_eq!(pids.split_whitespace().count(), 4);
    let cancel = host.request(json!({ "command": "cancel", "key": "k" }));
    assert_eq!(host.call(json!({ "command": "ping" }))["command"], "pong");
    assert_eq!(host.reply(&cancel)["command"], "cancel-response");
    for pid in pids.split_whitespace() {
        assert!(!is_alive(pid), "{pid} of {pids}");
    }
    let reply = host.reply(&waiting);
    assert_eq!((&reply["result"], &reply["reason"]), (&json!(false), &json!("cancelled")));
    assert_eq!(host.execute_keyed("k", "", true)["reason"], "unknown");
    // Cancelling a command that has ended, or an unknown key, succeeds.
    host.execute_keyed("ended", "true", false);
    for key in ["ended", "never"] {
        assert_eq!(host.call(json!({ "command": "cancel", "key": key }))["command"], "cancel-response");
    }
    assert_eq!(host.execute_keyed("ended", "", true)["reason"], "unknown");
}

#[test]
fn limits_running_and_queued_commands() {
    let mut host = Host::new();
    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    let line = format!("echo >> {fifo}.count; read line < {fifo}.$0");
    let started = || fs::read_to_string(format!("{fifo}.count")).unwrap_or_default().len();
    let line = line.replace(".$0", "");
    for number in 0..1033 {
        let key = format!("k{number}");
        host.request(json!({ "command": "execute", "command-line": line, "key": key }));
    }
    let refused = host.receive();
    assert_eq!((&refused["command"], &refused["unique"]), (&json!("command-error"), &json!("request-1034")));
    wait_until("the maximum number of commands runs", || started() == 32);
    for number in (32..1032).rev() {
        let key = format!("k{number}");
        assert_eq!(host.call(json!({ "command": "cancel", "key": key }))["command"], "cancel-response");
    }
    assert_eq!(started(), 32, "no cancelled command was started");
    let last = host.request(json!({ "command": "execute", "command-line": "echo last", "key": "last" }));
    let writer = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    std::io::Write::write_all(&mut &writer, "\n".repeat(32).as_bytes()).unwrap();
    assert_eq!(host.reply(&last)["stdout-size"], 5);
}

#[test]
fn limits_remembered_results() {
    let mut host = Host::new();
    for number in 0..1000 {
        let directory = host.path(&format!("spool/commands/old-{number:04}"));
        fs::create_dir(&directory).unwrap();
        let ending = json!({ "return-code": number, "stdout-size": 0, "stderr-size": 0 });
        fs::write(directory.join("ending"), ending.to_string()).unwrap();
    }
    host.restart_agent();
    assert_eq!(host.execute_keyed("old-0000", "", true)["return-code"], 0);
    assert_eq!(host.execute_keyed("new", "true", false)["return-code"], 0);
    assert_eq!(host.execute_keyed("old-0000", "", true)["reason"], "unknown");
    assert_eq!(host.execute_keyed("old-0001", "", true)["return-code"], 1);
    assert_eq!(fs::read_dir(host.path("spool/commands")).unwrap().count(), 1000);
}
