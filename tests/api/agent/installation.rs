//! Download of the agent and its install script.

use axum::body::Body;
use axum::http::Request;

use super::*;

async fn fetch(cluster: &Cluster, path: &str, host: &str) -> ApiResponse {
    let request = Request::builder().uri(path).header("host", host).body(Body::empty()).unwrap();
    cluster.request(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn install_script_uses_request_host() {
    let cluster = Cluster::new().await;
    let script = fetch(&cluster, "/agent/install.sh", "cloud.example:13000").await;
    assert_eq!(script.status, 200, "{}", script.text);
    assert!(script.text.starts_with("#!/bin/sh") && !script.text.contains("@URL@"), "{}", script.text);
    assert!(script.text.contains("http://cloud.example:13000"), "{}", script.text);
    assert!(script.headers["content-type"].to_str().unwrap().starts_with("text/x-shellscript"));
    for bad in ["a;reboot", "$(reboot)", "a b"] {
        assert_eq!(fetch(&cluster, "/agent/install.sh", bad).await.status, 400, "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_agent_binary_or_explains_its_absence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent");
    let setting = path.display().to_string();
    let cluster = Cluster::with(&[("AGENT_PROGRAM", &setting)], None).await;
    let missing = fetch(&cluster, "/agent/muster-agent", "x").await;
    assert_eq!(status_and_error(&missing), (404, "the file that AGENT_PROGRAM names cannot be read"));
    std::fs::write(&path, b"\x7fELF and so on").unwrap();
    let program = fetch(&cluster, "/agent/muster-agent", "x").await;
    assert_eq!((program.status.as_u16(), program.text.as_bytes()), (200, b"\x7fELF and so on".as_slice()));
    assert_eq!(program.headers["content-type"], "application/octet-stream");
}
