//! Commands: how they run, end, are remembered, lost and cancelled.

use std::fs;

use serde_json::json;

use crate::host::{Host, is_alive, until};

#[test]
fn a_command_tells_its_code_and_what_it_wrote() {
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

    let reply = host.ask(json!({ "command": "execute" }));
    assert_eq!(
        (&reply["command"], &reply["message"]),
        (&json!("command-error"), &json!("command-line is not set"))
    );
}

#[test]
fn a_long_output_is_cut_for_a_host_that_takes_it_whole() {
    let mut host = Host::new();
    let reply = host.execute("head -c 7000000 /dev/zero | tr '\\0' x; echo done >&2");
    assert_eq!(reply["stdout"].as_str().unwrap().len(), 5 << 20);
    assert_eq!((&reply["stderr"], &reply["return-code"]), (&json!("done\n"), &json!(0)));
}

#[test]
fn nobody_waits_for_a_command_in_the_background() {
    let mut host = Host::new();
    let mark = host.path_text("mark");
    let line = format!("echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 1000");
    let reply = host.ask(json!({ "command": "execute", "command-line": line, "block-for-result": false }));
    assert_eq!(reply["result"], true);
    until("it runs", || fs::exists(&mark).unwrap());
    let pid = fs::read_to_string(&mark).unwrap();
    assert_eq!(reply["pid"].to_string(), pid.trim());
    host.execute(&format!("kill {pid}"));
    until("it ended", || !is_alive(&pid));
}

#[test]
fn the_port_is_served_while_commands_run() {
    let mut host = Host::new();
    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    let slow = host.request(json!({ "command": "execute", "command-line": format!("cat {fifo}") }));
    assert_eq!(host.ask(json!({ "command": "ping" }))["command"], "pong");
    assert_eq!(host.execute("echo quick")["stdout"], "quick\n");
    host.execute(&format!("echo slow > {fifo}"));
    assert_eq!(host.reply(&slow)["stdout"], "slow\n");
}

#[test]
fn what_a_command_left_running_does_not_keep_it_from_ending() {
    let mut host = Host::new();
    let reply = host.execute("sleep 1000 & echo $!");
    let pid = reply["stdout"].as_str().unwrap().to_owned();
    assert!(is_alive(&pid), "it may go on");
    host.execute(&format!("kill {pid}"));
}

#[test]
fn a_command_with_a_key_runs_once_and_is_remembered() {
    let mut host = Host::new();
    let mark = host.path_text("mark");
    let line = format!("echo run >> {mark}; seq 1 200000; echo no >&2; exit 4");
    let reply = host.execute_key("k-0", &line, false);
    assert_eq!(
        (&reply["key"], &reply["result"], &reply["return-code"]),
        (&json!("k-0"), &json!(true), &json!(4))
    );
    assert!(reply.get("stdout").is_none() && reply.get("stdout-cut").is_none(), "{reply}");
    assert_eq!(reply["stderr-size"], 3);

    let again = host.execute_key("k-0", &line, true);
    assert_eq!((&again["return-code"], &again["stdout-size"]), (&json!(4), &reply["stdout-size"]));
    let output = host.output("k-0", "stdout");
    assert_eq!(output.len() as u64, reply["stdout-size"].as_u64().unwrap());
    assert!(output.ends_with(b"199999\n200000\n"));
    assert_eq!(host.output("k-0", "stderr"), b"no\n");
    assert_eq!(fs::read_to_string(&mark).unwrap(), "run\n");

    assert_eq!(host.ask(json!({ "command": "forget", "key": "k-0" }))["command"], "forget-response");
    let reply = host.execute_key("k-0", &line, true);
    assert_eq!((&reply["result"], &reply["reason"]), (&json!(false), &json!("unknown")));
    let request =
        json!({ "command": "read-output", "key": "k-0", "name": "stdout", "offset": 0, "length": 1 });
    assert_eq!(host.ask(request)["command"], "command-error");
    assert!(!fs::exists(host.path("spool/commands/k-0")).unwrap());
}

#[test]
fn a_command_is_found_again_after_the_host_went_away() {
    let mut host = Host::new();
    let fifo = host.path_text("fifo");
    host.execute(&format!("mkfifo {fifo}"));
    let line = format!("cat {fifo}; exit 5");
    host.request(json!({ "command": "execute", "command-line": line, "key": "k" }));
    until("it runs", || fs::exists(host.path("spool/commands/k/process")).unwrap());
    host.reconnect();
    let waiting =
        host.request(json!({ "command": "execute", "command-line": line, "key": "k", "again": true }));
    host.execute(&format!("echo now > {fifo}"));
    let reply = host.reply(&waiting);
    assert_eq!((&reply["return-code"], &reply["stdout-size"]), (&json!(5), &json!(4)));
}

#[test]
fn an_agent_that_was_killed_knows_what_ended_and_what_was_lost() {
    let mut host = Host::new();
    assert_eq!(host.execute_key("done", "echo kept; exit 6", false)["return-code"], 6);
    let mark = host.path_text("mark");
    let line = format!("sleep 1000 & echo $$ $! > {mark}.new; mv {mark}.new {mark}; wait");
    host.request(json!({ "command": "execute", "command-line": line, "key": "lost" }));
    until("it runs", || fs::exists(&mark).unwrap());
    until("it is noted", || fs::exists(host.path("spool/commands/lost/process")).unwrap());
    let pids = fs::read_to_string(&mark).unwrap();
    host.restart_agent();

    let reply = host.execute_key("done", "", true);
    assert_eq!((&reply["result"], &reply["return-code"]), (&json!(true), &json!(6)));
    assert_eq!(host.output("done", "stdout"), b"kept\n");
    for again in [true, false] {
        let reply = host.execute_key("lost", &line, again);
        assert_eq!((&reply["result"], &reply["reason"]), (&json!(false), &json!("lost")));
    }
    for pid in pids.split_whitespace() {
        until("what it started is gone", || !is_alive(pid));
    }
    assert_eq!(host.execute_key("other", "", true)["reason"], "unknown");

    // Another boot: nothing of it is true any more.
    fs::write(host.path("spool/boot"), "another one").unwrap();
    host.restart_agent();
    assert_eq!(host.execute_key("done", "", true)["reason"], "unknown");
}

#[test]
fn a_cancelled_command_ends_with_all_that_it_started() {
    let mut host = Host::new();
    let mark = host.path_text("mark");
    // One that does not listen, one of another group, one of another session.
    let line = format!(
        "(trap '' TERM; sleep 1000) & a=$!; setsid sleep 1000 & b=$!; \
         sh -mc 'sleep 1000 & echo $!; wait' > {mark}.c & until [ -s {mark}.c ]; do :; done; \
         echo $$ $a $b $(cat {mark}.c) > {mark}.new; mv {mark}.new {mark}; wait"
    );
    let waiting = host.request(json!({ "command": "execute", "command-line": line, "key": "k" }));
    until("it runs", || fs::exists(&mark).unwrap());
    let pids = fs::read_to_string(&mark).unwrap();
    assert_eq!(pids.split_whitespace().count(), 4);
    let cancel = host.request(json!({ "command": "cancel", "key": "k" }));
    assert_eq!(host.ask(json!({ "command": "ping" }))["command"], "pong");
    assert_eq!(host.reply(&cancel)["command"], "cancel-response");
    for pid in pids.split_whitespace() {
        assert!(!is_alive(pid), "{pid} of {pids}");
    }
    let reply = host.reply(&waiting);
    assert_eq!((&reply["result"], &reply["reason"]), (&json!(false), &json!("cancelled")));
    assert_eq!(host.execute_key("k", "", true)["reason"], "unknown");
    // It may be cancelled when it ended, and when it never was.
    host.execute_key("ended", "true", false);
    for key in ["ended", "never"] {
        assert_eq!(host.ask(json!({ "command": "cancel", "key": key }))["command"], "cancel-response");
    }
    assert_eq!(host.execute_key("ended", "", true)["reason"], "unknown");
}

#[test]
fn only_so_many_commands_run_and_wait() {
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
    until("as many run as may", || started() == 32);
    for number in (32..1032).rev() {
        let key = format!("k{number}");
        assert_eq!(host.ask(json!({ "command": "cancel", "key": key }))["command"], "cancel-response");
    }
    assert_eq!(started(), 32, "none of the others was started");
    let last = host.request(json!({ "command": "execute", "command-line": "echo last", "key": "last" }));
    let writer = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    std::io::Write::write_all(&mut &writer, "\n".repeat(32).as_bytes()).unwrap();
    assert_eq!(host.reply(&last)["stdout-size"], 5);
}

#[test]
fn only_so_many_ended_commands_are_remembered() {
    let mut host = Host::new();
    for number in 0..1000 {
        let folder = host.path(&format!("spool/commands/old-{number:04}"));
        fs::create_dir(&folder).unwrap();
        let ending = json!({ "return-code": number, "stdout-size": 0, "stderr-size": 0 });
        fs::write(folder.join("ending"), ending.to_string()).unwrap();
    }
    host.restart_agent();
    assert_eq!(host.execute_key("old-0000", "", true)["return-code"], 0);
    assert_eq!(host.execute_key("new", "true", false)["return-code"], 0);
    assert_eq!(host.execute_key("old-0000", "", true)["reason"], "unknown");
    assert_eq!(host.execute_key("old-0001", "", true)["return-code"], 1);
    assert_eq!(fs::read_dir(host.path("spool/commands")).unwrap().count(), 1000);
}
