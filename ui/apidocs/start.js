// Shows the document of the server that served this page, and nothing from anywhere else.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });
