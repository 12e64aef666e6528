//! Serial consoles, screenshots and VDI consoles.

use std::time::Duration;

use aws_lc_rs::signature::{ED25519, UnparsedPublicKey};
use axum::http::Method;
use muster_api::Listener;
use muster_node::SimulationScript;
use muster_test_cluster::{Cluster, wait_for};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::{create, object, path, post_action, status_and_error, text, try_create};
use crate::networks::{cluster, get};

#[tokio::test(flavor = "multi_thread")]
async fn reads_tail_of_serial_console_in_every_form_of_length() {
    let (cluster, token) = cluster(&[]).await;
    cluster.allow_undocumented_requests("released clients send the length in every form");
    let console = "0123456789".repeat(1200);
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript {
            console_text: Some(console.clone()),
            ..SimulationScript::default()
        });
    }
    let record = create(&cluster, &token, "www", &json!({})).await;
    let console_path = path(&record, "/consoledata");
    let read = async |body: Value| cluster.call(&token, Method::GET, &console_path, Some(body)).await;
    let whole = get(&cluster, &token, &console_path).await;
    assert_eq!(whole.headers["content-type"], "application/octet-stream");
    for default_length in [
        json!({}),
        json!({"length": null}),
        json!({"length": 0}),
        json!({"length": ""}),
        json!({"length": "0"}),
    ] {
        let response = read(default_length.clone()).await;
        assert_eq!(
            (response.status.as_u16(), response.text.as_str()),
            (200, &console[12000 - 10240..]),
            "{default_length}"
        );
    }
    assert_eq!(read(json!({"length": -1})).await.text, console);
    assert_eq!(read(json!({"length": "-1"})).await.text, console);
    assert_eq!(read(json!({"length": 4})).await.text, "6789");
    assert_eq!(read(json!({"length": "12"})).await.text, "890123456789");
    assert_eq!(read(json!({"length": 99999})).await.text, console);
    assert_eq!(get(&cluster, &token, &format!("{console_path}?length=3")).await.text, "789");
    for invalid in [json!("ten"), json!(1.5), json!(true), json!([4])] {
        let response = read(json!({"length": invalid})).await;
        assert_eq!(status_and_error(&response), (400, "length is not an integer"), "{invalid}");
    }
    assert_eq!(read(json!({"length": -2})).await.status, 400);
    let absent = get(&cluster, &token, "/instances/absent/consoledata?length=ten").await;
    assert_eq!(absent.status, 400, "validation comes before the lookup");

    let cleared = cluster.call(&token, Method::DELETE, &console_path, None).await;
    assert_eq!((cleared.status.as_u16(), cleared.text.as_str()), (200, "null\n"));
    let empty = get(&cluster, &token, &console_path).await;
    assert_eq!((empty.status.as_u16(), empty.text.as_str()), (200, ""));
    post_action(&cluster, &token, &record, "reboothard").await;
    assert_eq!(read(json!({"length": -1})).await.text, console, "the guest boots again");
    assert!(
        cluster.messages(&object(&record)).await.contains(&"clear console request from REST API".to_owned())
    );

    // An instance without a node has no console output.
    try_create(&cluster, &token, "huge", &json!({"cpus": 500})).await;
    let no_output = get(&cluster, &token, "/instances/huge/consoledata").await;
    assert_eq!((no_output.status.as_u16(), no_output.text.as_str()), (200, ""));
    assert_eq!(
        cluster.call(&token, Method::DELETE, "/instances/huge/consoledata", None).await.text,
        "null\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn screenshot_is_stored_as_png_blob() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let response = get(&cluster, &token, &path(&record, "/screenshot")).await;
    assert_eq!(response.status, 200, "{}", response.text);
    let blob = response.body.as_str().unwrap().to_owned();
    let bytes = cluster.download_until_error(&token, &blob).await;
    assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n"), "{:?}", &bytes[..8]);
    let blob_record = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    assert_eq!((text(&blob_record, "state"), &blob_record["size"]), ("created", &json!(bytes.len())));
    assert_eq!(
        get(&cluster, &token, &path(&record, "/screenshot")).await.body,
        response.body,
        "identical screenshots share one blob"
    );
    assert!(cluster.files_in("1/drafts").is_empty() && cluster.files_in("2/drafts").is_empty());
    let messages = cluster.messages(&object(&record)).await;
    assert!(messages.contains(&"screenshot request from REST API".to_owned()), "{messages:?}");
    post_action(&cluster, &token, &record, "poweroff").await;
    assert_eq!(get(&cluster, &token, &path(&record, "/screenshot")).await.status, 409);
    let initial = try_create(&cluster, &token, "young", &json!({})).await.body;
    let error = format!("instance {} is not ready (initial)", text(&initial, "uuid"));
    assert_eq!(
        status_and_error(&get(&cluster, &token, &path(&initial, "/screenshot")).await),
        (406, error.as_str())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn returns_virt_viewer_file() {
    let (cluster, token) = cluster(&[]).await;
    for (vdi, kind) in
        [("spice", "spice"), ("spiceconcurrent", "spice"), ("spicedebug", "spice"), ("vnc", "vnc")]
    {
        let video = json!({"placed_on": "sim-2", "video": {"model": "qxl", "memory": 16384, "vdi": vdi}});
        let record = create(&cluster, &token, vdi, &video).await;
        let response = get(&cluster, &token, &path(&record, "/vdiconsolehelper")).await;
        assert_eq!(
            (response.status.as_u16(), response.headers["content-type"].to_str().unwrap()),
            (200, "application/x-virt-viewer")
        );
        let mut lines = vec![
            "[virt-viewer]".to_owned(),
            format!("type={kind}"),
            "host=127.1.0.3".to_owned(),
            format!("port={}", record["vdi_port"]),
        ];
        if vdi != "vnc" {
            lines.push(format!("tls-port={}", record["vdi_tls_port"]));
            lines.push("host-subject=C=XX,O=Muster,CN=sim-2".into());
        }
        let shown = response.text.lines().find_map(|line| line.strip_prefix("password=")).unwrap();
        assert!(shown.len() >= 8, "{shown}");
        lines.push(format!("password={shown}"));
        lines.push("delete-this-file=1".into());
        if vdi != "vnc" {
            let pem = "-----BEGIN CERTIFICATE-----\\nc2ltdWxhdGVk\\n-----END CERTIFICATE-----\\n";
            lines.push(format!("ca={pem}"));
        }
        assert_eq!(response.text, lines.join("\n") + "\n");
        // Neither the record nor the events contain the password, which is new after a start.
        let current = get(&cluster, &token, &path(&record, "")).await.text;
        let events = format!("{:?}", cluster.events(&object(&record)).await);
        assert!(!current.contains(shown) && !events.contains(shown));
        post_action(&cluster, &token, &record, "poweroff").await;
        let off = get(&cluster, &token, &path(&record, "/vdiconsolehelper")).await;
        let expected = "the instance is off and has no display: power it on first";
        assert_eq!(status_and_error(&off), (409, expected));
        post_action(&cluster, &token, &record, "poweron").await;
        let next = get(&cluster, &token, &path(&record, "/vdiconsolehelper")).await.text;
        assert!(next.contains("\npassword=") && !next.contains(shown), "{next}");
    }
    try_create(&cluster, &token, "huge", &json!({"cpus": 500})).await;
    let without_node = get(&cluster, &token, "/instances/huge/vdiconsolehelper").await;
    assert_eq!(status_and_error(&without_node), (404, "placement node not found"));
}

/// Decodes standard or URL-safe base64.
fn decode(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for character in text.bytes().filter(|character| *character != b'=') {
        let value = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' | b'-' => 62,
            _ => 63,
        };
        (bits, count) = (bits << 6 | u32::from(value), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff) as u8);
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn console_proxy_token_verifies_with_published_key() {
    let settings =
        [("KERBSIDE_URL", "https://consoles.example/"), ("ZONE", "lab"), ("KERBSIDE_TOKEN_DURATION", "60")];
    let (cluster, token) = cluster(&settings).await;
    assert!(get(&cluster, "", "/").await.text.contains("vdi-console-proxy"));
    let initial = try_create(&cluster, &token, "young", &json!({})).await.body;
    let error = format!("instance {} is not ready (initial)", text(&initial, "uuid"));
    assert_eq!(
        status_and_error(&get(&cluster, &token, &path(&initial, "/vdiconsoleproxy")).await),
        (406, error.as_str())
    );
    let vnc = json!({"video": {"model": "vga", "memory": 16384, "vdi": "vnc"}});
    let vnc = create(&cluster, &token, "vnc", &vnc).await;
    let refused = get(&cluster, &token, &path(&vnc, "/vdiconsoleproxy")).await;
    assert_eq!(status_and_error(&refused), (409, "instance does not have a SPICE console"));
    let record = create(&cluster, &token, "www", &json!({})).await;
    let response = get(&cluster, &token, &path(&record, "/vdiconsoleproxy")).await;
    assert_eq!(
        (response.status.as_u16(), response.body.as_object().unwrap().len()),
        (200, 2),
        "{}",
        response.text
    );
    let url = text(&response.body, "url");
    let jwt = url.strip_prefix("https://consoles.example/sf-console.vv?token=").unwrap();

    let system = cluster.token("system").await;
    let keys = get(&cluster, &system, "/admin/vditokenpubkey").await.body;
    let (signed, signature) = jwt.rsplit_once('.').unwrap();
    let (head, claims) = signed.split_once('.').unwrap();
    let (head, claims): (Value, Value) =
        (serde_json::from_slice(&decode(head)).unwrap(), serde_json::from_slice(&decode(claims)).unwrap());
    assert_eq!((text(&head, "alg"), &head["kid"]), ("EdDSA", &keys["keys"][0]["kid"]));
    let pem: String =
        text(&keys["keys"][0], "pem").lines().filter(|line| !line.starts_with("-----")).collect();
    let der = decode(&pem);
    let public = UnparsedPublicKey::new(&ED25519, &der[der.len() - 32..]);
    public.verify(signed.as_bytes(), &decode(signature)).unwrap();
    assert!(public.verify(b"something else", &decode(signature)).is_err());
    assert_eq!((text(&claims, "iss"), text(&claims, "aud")), ("lab", "https://consoles.example"));
    assert_eq!(claims["exp"], response.body["expires_at"]);
    assert_eq!(claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(), 60);
    let helper = get(&cluster, &token, &path(&record, "/vdiconsolehelper")).await.text;
    assert!(helper.contains(&format!("\npassword={}\n", text(&claims, "password"))), "{helper}");
    assert_eq!((&claims["instance_uuid"], &claims["tls_port"]), (&record["uuid"], &record["vdi_tls_port"]));
    let events = cluster.events(&object(&record)).await;
    let event = events.iter().find(|event| event.message == "vdi console token created").unwrap();
    assert_eq!((&event.extra["jti"], &event.extra["kid"]), (&claims["jti"], &head["kid"]));
    assert!(!format!("{events:?}").contains(jwt), "events do not contain tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_console_tokens_without_proxy_or_signing_key() {
    let (without_proxy, token) = cluster(&[]).await;
    let record = create(&without_proxy, &token, "www", &json!({})).await;
    let refused = get(&without_proxy, &token, &path(&record, "/vdiconsoleproxy")).await;
    assert_eq!(status_and_error(&refused), (404, "kerbside integration is not configured"));
    let (without_key, token) =
        cluster(&[("KERBSIDE_URL", "https://x.example"), ("KERBSIDE_SIGNING_KEY", "")]).await;
    let record = create(&without_key, &token, "www", &json!({})).await;
    let refused = get(&without_key, &token, &path(&record, "/vdiconsoleproxy")).await;
    assert_eq!(refused.status, 500);
    assert!(
        status_and_error(&refused).1.starts_with("kerbside signing key is not configured"),
        "{}",
        refused.text
    );
    let system = without_key.token("system").await;
    assert_eq!(get(&without_key, &system, "/admin/vditokenpubkey").await.status, 404);
}

/// Serves the API of a cluster on a port and returns its URL.
pub(crate) async fn serve(cluster: &Cluster) -> String {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let listener = Listener { socket, tls: None, timeout: Duration::from_secs(60), max_connections: 16 };
    let (service, (stop, stopped)) = (cluster.service.clone(), watch::channel(false));
    tokio::spawn(async move {
        let call = move |request, peer| {
            let service = service.clone();
            async move { service.call(request, peer).await }
        };
        muster_api::serve(listener, call, stopped).await;
        drop(stop);
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread")]
async fn upgraded_connection_is_the_serial_console() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let url = format!("{}{}", serve(&cluster).await, path(&record, "/console"));
    let open = async |token: &str, protocol: &str| {
        let request = reqwest::Client::new().get(&url).bearer_auth(token);
        request.header("connection", "upgrade").header("upgrade", protocol).send().await.unwrap()
    };
    let stranger = cluster.token("system").await;
    assert_eq!(open("nonsense", "muster-console").await.status(), 401);
    assert_eq!(open(&token, "websocket").await.status(), 400);
    assert_eq!(open(&stranger, "muster-console").await.status(), 101);
    let response = open(&token, "Muster-Console").await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["upgrade"]),
        (101, &"muster-console".parse().unwrap())
    );
    let mut console = response.upgrade().await.unwrap();
    let mut output = Vec::new();
    while !output.ends_with(b"www login: ") {
        assert_ne!(console.read_buf(&mut output).await.unwrap(), 0);
    }
    // Any byte reaches the guest.
    let bytes: Vec<u8> = (0..=255).collect();
    console.write_all(&bytes).await.unwrap();
    let mut echoed = vec![0; bytes.len()];
    console.read_exact(&mut echoed).await.unwrap();
    assert_eq!(echoed, bytes);
    let events = cluster.events(&object(&record)).await;
    let opened = events.iter().find(|event| event.message == "console request from REST API").unwrap();
    assert_eq!(opened.extra["source"], "127.0.0.1");
    post_action(&cluster, &token, &record, "poweroff").await;
    assert_eq!(open(&token, "muster-console").await.status(), 409);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_consoles_name_the_caller() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let system = cluster.token("system").await;
    let url = format!("{}{}", serve(&cluster).await, path(&record, "/console"));
    let request = reqwest::Client::new().get(&url).bearer_auth(&system);
    let request = request.header("connection", "upgrade").header("upgrade", "muster-console");
    assert_eq!(request.send().await.unwrap().status(), 101);
    for (method, call) in
        [(Method::DELETE, "/consoledata"), (Method::GET, "/screenshot"), (Method::GET, "/vdiconsolehelper")]
    {
        let response = cluster.call(&system, method, &path(&record, call), None).await;
        assert_eq!(response.status, 200, "{call}: {}", response.text);
    }
    let events = cluster.events(&object(&record)).await;
    for request in ["console", "clear console", "screenshot", "vdi console helper"] {
        let message = format!("{request} request from REST API");
        let event = events.iter().find(|event| event.message == message).expect(&message);
        assert_eq!(event.extra["caller"], "system", "{message}");
        assert!(event.extra["keyname"].is_string(), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_the_serial_port_are_sampled_events() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({"placed_on": "sim-2"})).await;
    let id = text(&record, "uuid").parse().unwrap();
    let connections = async || {
        let events = cluster.events(&object(&record)).await;
        let message = "connection to the port of the serial console";
        events.into_iter().filter(|event| event.message == message).collect::<Vec<_>>()
    };
    // The reconciler of the cluster subscribes in the background.
    let first = wait_for("the first event", async || {
        cluster.other.connect_console(id, "10.0.0.9:4000".parse().unwrap(), 500);
        connections().await.pop()
    })
    .await;
    assert_eq!(first.extra["source"], "10.0.0.9");
    assert!(connections().await.len() <= 100, "{}", connections().await.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_ports_are_neither_in_records_nor_in_viewer_files() {
    let (cluster, token) = cluster(&[("CONSOLE_PORTS", "false")]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    for port in ["console_port", "vdi_port", "vdi_tls_port"] {
        assert_eq!(record[port], Value::Null, "{port}");
    }
    let refused = get(&cluster, &token, &path(&record, "/vdiconsolehelper")).await;
    assert_eq!(refused.status, 404);
    assert!(status_and_error(&refused).1.contains("CONSOLE_PORTS"), "{}", refused.text);
}
